"""What carries payloads between ranks."""
