# Every target sets up what it needs. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -Eeuo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# ---- image -------------------------------------------------------------------------------------------------------------
# FLAVOR      gpu (NVIDIA's PyTorch image) or cpu (the twin's)
# BASE_IMAGE  another base of that flavor, as nvcr.io/nvidia/pytorch:24.12-py3 for V100
# IMAGE       the name to give
# CA          a file with the certificates that a proxy on the way to the package indexes needs
FLAVOR ?= gpu
BASE_IMAGE ?= $(if $(filter cpu,$(FLAVOR)),debian:bookworm-slim,nvcr.io/nvidia/pytorch:25.12-py3)
IMAGE ?= tridock:$(if $(filter cpu,$(FLAVOR)),cpu,latest)
CA ?=

.PHONY: image
image: ## Build the image: tridock:latest on NVIDIA's PyTorch image, or tridock:cpu with FLAVOR=cpu
	@tools/build-image.sh '$(FLAVOR)' '$(BASE_IMAGE)' '$(IMAGE)' '$(CA)'

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
