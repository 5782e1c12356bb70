"""One model call from its first byte to its capture, over whichever protocol it arrived."""
