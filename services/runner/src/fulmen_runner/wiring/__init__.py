"""Creates the parts of the runner: what executes attempts, in the service and offline."""
