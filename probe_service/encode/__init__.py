"""Encoders: from a name to unit vectors, checked at load and cached on disk. torch is imported on first use."""

from probe_service.encode.cache import CacheHits, VectorCache, encode_with_cache
from probe_service.encode.canaries import Canary, record_canaries
from probe_service.encode.dropout import DropoutSimilarities, dropout_similarities
from probe_service.encode.load import default_encoder_name, load_encoder, load_for_training
from probe_service.encode.protocol import CheckedEncoder, EncodedTexts, Encoder
from probe_service.encode.same_meaning import SimilarityFloor, same_meaning_similarity_floor

__all__ = [
    "CacheHits",
    "Canary",
    "CheckedEncoder",
    "DropoutSimilarities",
    "EncodedTexts",
    "Encoder",
    "SimilarityFloor",
    "VectorCache",
    "default_encoder_name",
    "dropout_similarities",
    "encode_with_cache",
    "load_encoder",
    "load_for_training",
    "record_canaries",
    "same_meaning_similarity_floor",
]
