"""What people see: nouns in, text and pictures out."""
