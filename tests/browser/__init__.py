"""The notebooks as a class uses them: a real JupyterLab in a real Chromium."""
