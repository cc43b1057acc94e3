"""The index of reusable pages, its eviction order and what enters it (`build_prefix_cache`,
`build_evictor`, `decide_cache_admission`)."""
