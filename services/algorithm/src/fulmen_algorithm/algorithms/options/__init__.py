"""Parts that a policy-gradient algorithm has if its settings ask for them."""
