"""What people see: typed results in, text and pictures out."""
