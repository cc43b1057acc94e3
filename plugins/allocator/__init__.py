"""Which free pages are handed out (`build_allocator`)."""
