"""Model families of Hugging Face: a map of config.json to `[model]` and a table of names for each."""
