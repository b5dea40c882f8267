"""The embedded world: a small language of product reviews, and the gold reward that plays the human."""
