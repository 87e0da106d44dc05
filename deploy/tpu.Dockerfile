# A run on TPUs: docker build -f deploy/tpu.Dockerfile -t IMAGE .
FROM python:3.11-slim
WORKDIR /specrl_jax
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY kernels kernels
COPY specrl_jax specrl_jax
RUN pip install --no-cache-dir -c constraints.txt -e ".[tpu]"
COPY experiments experiments
CMD ["python", "experiments/train.py", "--help"]
