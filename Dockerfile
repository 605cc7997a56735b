# Two uses of one image: the server, `docker run -i belljar`, and the system that sessions of the `container` sandbox
# see, for which belljar looks under this name:
#
#     docker build -t belljar:latest .        (or podman)
#
# A session's own interpreter is the host's and is shown at its own path; it needs a glibc as new as the host's, and the
# libraries that wheels are linked with.
FROM python:3.12-slim

RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates fontconfig libgomp1 libseccomp2 libstdc++6 \
 && rm -rf /var/lib/apt/lists/*

COPY pyproject.toml README.md CHANGELOG.md LICENSE /source/
COPY src /source/src
# An environment of its own: the system's Python may belong to its package manager.
RUN python3 -m venv /opt/belljar \
 && /opt/belljar/bin/pip install --no-cache-dir /source \
 && rm -rf /source \
 && ln -s /opt/belljar/bin/belljar /usr/local/bin/belljar

# No VOLUME: in the `container` sandbox nothing but the session's own folders may be written.
RUN useradd --create-home --uid 1000 belljar
USER belljar
WORKDIR /home/belljar
ENTRYPOINT ["belljar"]
CMD ["serve"]
