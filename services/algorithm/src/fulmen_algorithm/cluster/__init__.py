"""Groups of processes on one machine or many: started, watched and stopped through an existing engine."""
