# A server or a node of a federation in one image: `docker build -t sartor .`, then `docker run sartor serve ...` or `join ...`.
FROM python:3.11-slim AS build
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM python:3.11-slim
# PyTorch's build without CUDA: an image of under two gigabytes. For GPUs leave the index out and use a CUDA base image.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN pip install --no-cache-dir --extra-index-url "$TORCH_INDEX" -c /wheels/constraints.txt \
      "sartor[flower,report] @ file://$(ls /wheels/sartor-*.whl)" && rm -r /wheels
RUN useradd --create-home --uid 1000 sartor && install -d -o sartor -g sartor -m 0700 /state /runs
USER sartor
WORKDIR /home/sartor
# What must outlive the container: a node's states and keys, a server's runs.
VOLUME ["/state", "/runs"]
EXPOSE 8000
ENTRYPOINT ["sartor"]
CMD ["--help"]
