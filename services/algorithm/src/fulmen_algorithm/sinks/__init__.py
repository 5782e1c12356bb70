"""Metric sinks of runs, besides the event log: TensorBoard, Weights & Biases, MLflow, Prometheus."""
