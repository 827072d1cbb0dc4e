"""What trains: torch lives here. Importable with torch, numpy and safetensors alone."""
