"""Where the metrics of runs go besides their event log: TensorBoard, Weights & Biases, MLflow, Prometheus."""
