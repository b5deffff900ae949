"""The planning side: scenario files, search, runs and reports. Never imports torch; training is started as a subprocess."""
