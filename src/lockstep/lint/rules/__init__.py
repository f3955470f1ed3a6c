"""The rules, a file for each subject; ``lint.check`` collects them."""
