"""What is recorded of model calls, and how it reaches the store: through memory, or the disk while the store is away."""
