# docker build -t tito-audit .                                # with extras: --build-arg EXTRAS=serve,transformers
# docker run --rm -v "$PWD:/work" tito-audit scan rollouts/ -t models/policy
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG EXTRAS=
WORKDIR /source
COPY . .
RUN python -m venv --without-pip /opt/tito-audit \
 && pip --python /opt/tito-audit/bin/python install --no-cache-dir ".${EXTRAS:+[$EXTRAS]}"

FROM python:${PYTHON}-slim
COPY --from=build /opt/tito-audit /opt/tito-audit
# What a run keeps between two runs goes with the container; HF_HOME is where `-t org/model` downloads to.
ENV PATH=/opt/tito-audit/bin:$PATH \
    HF_HOME=/tmp/huggingface \
    XDG_CACHE_HOME=/tmp/cache
RUN useradd --no-create-home --uid 1000 audit
USER audit
WORKDIR /work
ENTRYPOINT ["tito-audit"]
CMD ["--help"]
