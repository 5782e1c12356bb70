"""Which backend answers which call: routes, balancing, circuit breakers, retries."""
