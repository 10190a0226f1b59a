from servers.fixtures import bucket, proxy, s3_server

__all__ = ["bucket", "proxy", "s3_server"]
