"""Groups of processes on one machine or many: started by an existing engine, told of their deaths, stopped."""
