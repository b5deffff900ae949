"""How results look: terminal tables, CSV and Parquet."""
