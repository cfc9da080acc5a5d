"""Where tq-fs meets other programs; each is imported by its own name."""
