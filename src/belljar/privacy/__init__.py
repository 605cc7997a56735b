"""Personal data and secrets: replaced by tokens before a model sees them, put back where they may go."""
