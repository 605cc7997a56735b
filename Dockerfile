# syntax=docker/dockerfile:1
# The server with the environment of its sessions, for laptops, servers and session pools:
#
#     docker build -t belljar .
#     docker run -p 8000:8000 belljar        HTTP at port 8000, with a key that it shows once
#     docker run -i --rm belljar             stdio, for a client that starts it
#
# It is also the system that sessions of the `container` sandbox see, for which belljar looks under belljar:latest. A
# session's own interpreter is the host's then and is shown at its own path; it needs a glibc as new as the host's, and
# the libraries that wheels are linked with. docs/guides/containers.md says more.

# Any Linux with glibc and Python 3.11 or newer.
ARG BASE=python:3.12-slim
FROM ${BASE}

# What clients see: interpreter, executor, toolbox, azure-mcp or foundry; BELLJAR_SURFACES chooses again at the start.
ARG SURFACE=interpreter
# What sessions have: pandas, numpy, matplotlib and their like (750 MB), or with `no` little more than IPython; and further
# packages, as pip takes them.
ARG SCIENCE=yes
ARG PACKAGES=""
# With `yes` a browser (550 MB), with which sessions draw Plotly's figures as pictures.
ARG BROWSER=no
# Compiled modules make every start quicker, because nobody can write them later.
ARG COMPILE=1

RUN if command -v apt-get > /dev/null; then \
      apt-get update \
      && apt-get install -y --no-install-recommends ca-certificates fontconfig libgomp1 libseccomp2 libstdc++6 \
           $(if [ "${BROWSER}" = yes ]; then echo chromium; fi) \
      && rm -rf /var/lib/apt/lists/*; \
    fi

COPY pyproject.toml hatch_build.py README.md CHANGELOG.md LICENSE /source/
COPY src /source/src
# Two environments of their own: the system's Python may belong to its package manager, and sessions see nothing of the
# server's packages.
RUN --mount=type=cache,target=/root/.cache/uv \
    export UV_LINK_MODE=copy UV_COMPILE_BYTECODE=${COMPILE} \
 && python3 -m venv /opt/belljar && python3 -m venv --without-pip /opt/session \
 && /opt/belljar/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check uv \
 && /opt/belljar/bin/uv pip install --quiet --python /opt/belljar/bin/python "/source[azure]" \
 && if [ "${SCIENCE}" = yes ]; then set -- --requirement /source/src/belljar/environments/science.lock.txt; \
    else set -- "ipython>=9" cloudpickle pip; fi \
 && /opt/belljar/bin/uv pip install --quiet --python /opt/session/bin/python "$@" ${PACKAGES} \
 && rm -rf /source \
 && ln -s /opt/belljar/bin/belljar /usr/local/bin/belljar

# No VOLUME: in the `container` sandbox nothing but the session's own folders may be written. A named volume at /data
# takes over this folder's owner. /mnt is the user's, so that a session can see its folder at /mnt/data where the engine
# forbids mounts.
RUN echo "belljar:x:1000:1000::/home/belljar:/bin/sh" >> /etc/passwd \
 && echo "belljar:x:1000:" >> /etc/group \
 && mkdir -m 700 /data && mkdir -p /home/belljar /mnt && chown 1000:1000 /data /home/belljar /mnt

ENV BELLJAR_DATA_DIRECTORY=/data \
    BELLJAR_DOWNLOAD_DIRECTORY=/data/downloads \
    BELLJAR_ENVIRONMENT=/opt/session \
    BELLJAR_SURFACES=${SURFACE} \
    container=oci \
    PYTHONDONTWRITEBYTECODE=1
USER belljar
WORKDIR /home/belljar
EXPOSE 8000
ENTRYPOINT ["belljar"]
CMD ["container"]
