# Panax on NVIDIA GPUs, on NVIDIA's JAX image. In the root of a clone:
#   docker build -f containers/cuda.Dockerfile --build-arg BASE=nvcr.io/nvidia/jax@sha256:DIGEST -t panax:cuda .
# docs/start/containers.md says how to look the digest up. Neither built nor run on a GPU yet.
ARG BASE

FROM ${BASE} AS build
ARG BASE
RUN case "$BASE" in *@sha256:????????????????????????????????????????????????????????????????) ;; \
    *) echo "BASE=$BASE: expected NAME@sha256:DIGEST, since a tag can move; see docs/start/containers.md" >&2; exit 2 ;; esac
WORKDIR /src
COPY requirements/run.txt all.txt
# The image's own jax stays, with what it was built with; the image's constraints are for its own packages.
RUN sed -E '/^(jax|jaxlib|ml-dtypes|numpy|opt-einsum|scipy)==/,/[^\\]$/d' all.txt > run.txt \
    && python3 -m venv --without-pip --system-site-packages /opt/panax \
    && PIP_CONSTRAINT='' python3 -m pip --python /opt/panax/bin/python install --no-cache-dir --no-deps -r run.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY recipes recipes
# Nothing is fetched here: where the image's jax is not one that Panax takes, this says so.
RUN PIP_CONSTRAINT='' python3 -m pip --python /opt/panax/bin/python install --no-cache-dir --no-index --no-build-isolation .

FROM ${BASE}
COPY --from=build /opt/panax /opt/panax
RUN install -d -o 1000 -g 1000 /runs /cache
ENV PATH=/opt/panax/bin:$PATH HOME=/cache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /runs
USER 1000:1000
ENTRYPOINT ["panax"]
