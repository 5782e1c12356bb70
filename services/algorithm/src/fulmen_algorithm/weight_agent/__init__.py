"""The weight agent: runs an engine on another machine for a training run, and keeps its weights current."""
