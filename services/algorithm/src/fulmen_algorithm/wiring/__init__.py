"""Creates the parts of the service: its runs, what they compute on, its models, its trainers and its servicers."""
