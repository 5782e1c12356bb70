"""The APIs that agents call, one file each: how requests are read and answers are parsed."""
