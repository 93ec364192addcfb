"""A load test: requests at a rate, whatever the server does with them."""
