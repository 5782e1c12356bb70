"""Where the figures of runs go besides their event log: TensorBoard, Weights & Biases, MLflow, Prometheus."""
