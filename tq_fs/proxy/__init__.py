"""HTTP in front of the rollout engine: sessions recorded as agents talk."""
