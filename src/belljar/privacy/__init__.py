"""Personal data and secrets: replaced by tokens before a model sees them, and put back for tools that may have them."""
