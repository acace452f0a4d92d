"""What megarl knows of model families: their config.json and what it refuses."""
