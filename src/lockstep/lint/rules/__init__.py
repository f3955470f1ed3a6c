"""The rules, grouped by what they look at; ``catalogue`` lists them all."""
