"""Exchange of gradients between ranks: codecs, what carries their payloads, and who decides how much is sent."""
