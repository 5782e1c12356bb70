"""Which backend answers which call: routes, load balancing, circuit breakers, retries."""
