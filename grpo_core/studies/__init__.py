"""Studies: many runs, several seeds each, compared; tables and figures go into outputs/. The notebooks read them there."""
