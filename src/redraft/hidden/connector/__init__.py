"""What a vLLM server loads: the one folder on its PYTHONPATH, so nothing here may import redraft."""
