"""What the proxy keeps on disk: captures that the store has not got yet."""
