"""Built-in models, published weights, and the choice of what is trained."""
