# A run on NVIDIA GPUs: docker build -f deploy/gpu.Dockerfile -t IMAGE .
# CUDA comes with JAX; the driver comes from the host, by the NVIDIA Container Toolkit.
FROM python:3.12-slim
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /specrl_jax
COPY pyproject.toml README.md LICENSE constraints-0.11.txt ./
COPY kernels kernels
COPY specrl_jax specrl_jax
RUN pip install --no-cache-dir -c constraints-0.11.txt -e ".[gpu]"
COPY experiments experiments
CMD ["python", "experiments/train.py", "--help"]
