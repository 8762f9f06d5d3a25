"""Text generation of models whose weights do not fit a budget of device memory."""
