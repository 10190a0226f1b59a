# Panax on CPUs. In the root of a clone: docker build -f containers/cpu.Dockerfile -t panax:cpu .
# docs/start/containers.md says what it expects when it runs. The digest is that of the index of all architectures.
ARG BASE=docker.io/library/python:3.12-slim@sha256:57cd7c3a7a273101a6485ba99423ee568157882804b1124b4dd04266317710de

FROM ${BASE} AS build
ARG BASE
RUN case "$BASE" in *@sha256:????????????????????????????????????????????????????????????????) ;; \
    *) echo "BASE=$BASE: expected NAME@sha256:DIGEST, since a tag can move; see docs/start/containers.md" >&2; exit 2 ;; esac
WORKDIR /src
COPY requirements/run.txt requirements/run.txt
RUN python3 -m venv /opt/panax && /opt/panax/bin/python -m pip install --no-cache-dir -r requirements/run.txt
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY recipes recipes
RUN /opt/panax/bin/python -m pip install --no-cache-dir --no-build-isolation --no-deps . \
    && /opt/panax/bin/python -m pip check

FROM ${BASE}
COPY --from=build /opt/panax /opt/panax
RUN install -d -o 1000 -g 1000 /runs /cache
ENV PATH=/opt/panax/bin:$PATH HOME=/cache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /runs
USER 1000:1000
ENTRYPOINT ["panax"]
