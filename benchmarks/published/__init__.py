"""Published measurements of other people's systems, and their prediction: `python -m benchmarks.published` (docs/published.md has the schema)."""
