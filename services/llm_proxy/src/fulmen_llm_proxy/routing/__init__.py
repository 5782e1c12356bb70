"""Selection of backends: routes, load balancing, circuit breakers, retries."""
