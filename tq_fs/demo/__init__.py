"""The main job, end to end, on a real mixture-of-experts model with random weights."""
