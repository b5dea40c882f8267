"""What each stage does: artifacts in, one artifact out."""
