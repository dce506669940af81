"""What runs learn from: files, split and made into batches."""
