"""The store and the model proxy, as the runner uses them."""
