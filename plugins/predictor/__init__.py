"""Expected output lengths."""
